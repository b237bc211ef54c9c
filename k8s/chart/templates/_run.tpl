{{- /*
`.run`: what KubernetesRun (elastic_trainer/cli/k8s.py) makes of the values, under its names. A test compares what
the chart and `elastic-trainer k8s render` make of the same run.
*/}}
{{- define "elastic-trainer.quantity" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" (toString .) -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number (toString .))) -}}
{{- end }}

{{- define "elastic-trainer.run" }}
{{- $v := .Values }}
{{- $name := $v.name | default .Release.Name }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$" $name) }}
{{- fail (printf "the name %q cannot be that of a run: at most 52 lower-case letters, digits and '-', a letter first; give another with --set name=" $name) }}
{{- end }}
{{- $least := required "minNodes: the fewest pods that the run trains with" $v.minNodes | int }}
{{- $most := required "maxNodes: the most pods that the run trains with" $v.maxNodes | int }}
{{- $pods := $v.pods | default $most | int }}
{{- if or (lt $pods $least) (gt $pods $most) }}
{{- fail (printf "%d pods are not within minNodes %d and maxNodes %d; change pods" $pods $least $most) }}
{{- end }}
{{- $gpus := int $v.gpus }}
{{- $workers := $v.workers | default (max 1 $gpus) | int }}
{{- if and $gpus (ne $workers $gpus) }}
{{- fail (printf "%d workers for %d GPUs; give one worker to each" $workers $gpus) }}
{{- end }}
{{- $units := $gpus | default $workers }}
{{- $cpu := list ($v.cpu.request | default (mul $units (ternary 8 1 (gt $gpus 0))) | toString) }}
{{- $cpu = append $cpu ($v.cpu.limit | default (index $cpu 0) | toString) }}
{{- $memory := list ($v.memory.request | default (printf "%dGi" (mul $units (ternary 32 2 (gt $gpus 0)))) | toString) }}
{{- $memory = append $memory ($v.memory.limit | default (ternary (index $memory 0) (printf "%dGi" (mul $units (ternary 64 4 (gt $gpus 0)))) (not (empty $v.memory.request))) | toString) }}
{{- $shm := $v.shm | default (printf "%dGi" (ternary (mul 8 $units) 1 (gt $gpus 0))) }}
{{- range $each := list (list "cpu" $cpu) (list "memory" $memory) }}
{{- if gt (include "elastic-trainer.quantity" (index $each 1 0) | float64) (include "elastic-trainer.quantity" (index $each 1 1) | float64) }}
{{- fail (printf "%s: the request, %s, is larger than the limit, %s" (index $each 0) (index $each 1 0) (index $each 1 1)) }}
{{- end }}
{{- end }}
{{- if gt (mulf 2 (include "elastic-trainer.quantity" $shm | float64)) (include "elastic-trainer.quantity" (index $memory 1) | float64) }}
{{- fail (printf "shm %s is more than half of the memory, %s, of which it is a part" $shm (index $memory 1)) }}
{{- end }}
{{- $conf := $v.rdzvConf | default dict }}
{{- range $key := list "node_id" "interface" "metrics_address" "metrics_port" "alive_file" }}
{{- if hasKey $conf $key }}
{{- fail (printf "rdzvConf: %s cannot be given: it is the pod's own" $key) }}
{{- end }}
{{- end }}
{{- /* As render, which cannot look into an image either. A script that is given is judged by its imports. */}}
{{- $text := $v.source.text | default "" }}
{{- $imports := regexMatch `(?m)^[ \t]*from[ \t]+elastic_trainer[.\w]*[ \t]+import[ \t]+(\([^)]*|[^\n(#]*)\b(Session|Trainer)\b` $text }}
{{- $names := and (regexMatch `(?m)^[ \t]*import[ \t]+([^\n#]*[ \t,])?elastic_trainer\b` $text) (regexMatch `\.(Session|Trainer)\b` $text) }}
{{- $job := and (gt (len $v.args) 1) (eq (join " " (slice $v.args 0 (min 2 (len $v.args) | int))) "-m elastic_trainer.training") }}
{{- $recovery := $v.recovery | default (ternary "in_place" "restart" (or $imports $names $job)) }}
{{- $options := list (printf "recovery=%s" (get $conf "recovery" | default $recovery)) "node_id=$(POD_NAME)" "interface=$(POD_IP)" "metrics_address=0.0.0.0" "metrics_port=9471" "alive_file=/tmp/alive" }}
{{- $options = append $options (printf "connect_timeout=%v" (get $conf "connect_timeout" | default 120)) }}
{{- range $key, $value := omit $conf "recovery" "connect_timeout" }}
{{- $options = append $options (printf "%s=%v" $key $value) }}
{{- end }}
{{- $connect := get $conf "connect_timeout" | default 120 | float64 }}
{{- $start := addf 30 (mulf 2 $connect) }}
{{- if ne (get $conf "preflight" | default "off") "off" }}
{{- $start = addf $start 130 $connect }}
{{- end }}
{{- if and $v.startupTimeout (lt (float64 $v.startupTimeout) $start) }}
{{- fail (printf "startupTimeout %v is below what a start takes, %v" $v.startupTimeout $start) }}
{{- end }}
{{- $shutdown := int $v.shutdownTimeout }}
{{- $environment := $v.env | default dict }}
{{- $variables := dict }}
{{- if $v.endpoint }}
{{- $_ := set $variables "ELASTIC_TRAINER_ENDPOINT" $v.endpoint }}
{{- if $v.tlsSecret }}
{{- range $key, $file := dict "CA_CERT" "ca.crt" "CERT" "tls.crt" "KEY" "tls.key" }}
{{- $_ := set $variables (printf "ELASTIC_TRAINER_%s" $key) (printf "/etc/elastic-trainer-tls/%s" $file) }}
{{- end }}
{{- end }}
{{- if $v.userSecret }}
{{- $_ := set $variables "ELASTIC_TRAINER_PASSWORD_FILE" "/etc/elastic-trainer-etcd/password" }}
{{- end }}
{{- end }}
{{- range $key, $value := $environment }}
{{- if has $key (list "POD_NAME" "POD_IP" "NPROC_PER_NODE") }}
{{- fail (printf "env: %s cannot be given: it is the pod's own" $key) }}
{{- end }}
{{- $_ := set $variables $key (toString $value) }}
{{- end }}
{{- $may_fail := sub $pods $least }}
{{- if $v.queue }}
{{- $may_fail = min $may_fail $least }}
{{- end }}
{{- $_ := set . "run" (dict
  "name" $name
  "image" (required "image: the image of the pods, with elastic_trainer and dumb-init" $v.image)
  "words" (required "args: what torchrun runs in the pod, such as {/app/train.py,--epochs=10}" ($v.args | default nil) | default list)
  "least" $least "most" $most "pods" $pods "workers" $workers "gpus" $gpus "may_fail" $may_fail
  "cpu" $cpu "memory" $memory "shm" $shm
  "gpu_resource" (ternary (printf ", nvidia.com/gpu: \"%d\"" $gpus) "" (gt $gpus 0))
  "threads" (max 1 (div (include "elastic-trainer.quantity" (index $cpu 1) | float64 | floor | int) $workers))
  "rendezvous" (join "," $options)
  "max_restarts" (int $v.maxRestarts) "retries" (int $v.retries)
  "shutdown_timeout" $shutdown "grace_s" (add $shutdown 30) "leave_within_s" (sub $shutdown 10)
  "startup_limit_s" (ternary (int $v.startupTimeout) (mul 60 (divf $start 60 | ceil | int)) (not (empty $v.startupTimeout)))
  "ttl" (ternary nil (int $v.ttl) (kindIs "invalid" $v.ttl))
  "priority_class" $v.priorityClass "spread" $v.spread "queue" $v.queue
  "endpoint" $v.endpoint "tls_secret" $v.tlsSecret "user_secret" $v.userSecret "network_policy" $v.networkPolicy
  "checkpoint_claim" $v.checkpoints.claim "checkpoint_size" $v.checkpoints.size
  "storage_class" $v.checkpoints.storageClass "access_mode" $v.checkpoints.accessMode
  "data_claim" $v.dataClaim "service_account" $v.serviceAccount
  "env" $environment "variables" $variables
  "source" (ternary $v.source nil (not (empty $v.source.text)))) }}
{{- end }}
