#!/usr/bin/env bash
# Certificates for an etcd that speaks TLS and asks its clients for theirs: a CA, one certificate each for etcd's
# clients' port, for its peers, and for its clients. A key that is there is never replaced; a certificate is made anew
# when it ends within 30 days. So the same command renews them.
#
#   deploy/etcd/certificates.sh [-n NAMESPACE] [-r REPLICAS] [-d DAYS] [-a NAME]... [-u USER]... DIRECTORY
#
#   -n NAMESPACE  of the service `etcd` on Kubernetes (default: elastic-trainer)
#   -r REPLICAS   names etcd-0 ... etcd-N are valid (default: 3)
#   -d DAYS       that the certificates are valid for; the CA ten times as long (default: 365)
#   -a NAME       one more host name or IP address by which etcd is reached
#   -u USER       also a certificate that makes its holder etcd's USER, say run-mnist, in place of a password
set -euo pipefail

namespace=elastic-trainer replicas=3 days=365 names=() users=()

fail() {
  echo "certificates.sh: $1" >&2
  exit 78
}

while getopts "n:r:d:a:u:" option; do
  case $option in
    n) namespace=$OPTARG ;;
    r) replicas=$OPTARG ;;
    d) days=$OPTARG ;;
    a) names+=("$OPTARG") ;;
    u) users+=("$OPTARG") ;;
    *) fail "see the first lines of this file" ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -eq 1 ]] || fail "say one directory for the certificates"
[[ $namespace =~ ^[a-z0-9]([-a-z0-9]*[a-z0-9])?$ ]] || fail "-n $namespace is not a name of a namespace"
[[ $replicas =~ ^[1-9][0-9]?$ && $days =~ ^[1-9][0-9]{0,3}$ ]] || fail "-r and -d take numbers above 0"
for name in "${users[@]}"; do
  [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "-u $name is not a name of a user"
  # Their files, root, and the names by which etcd knows itself and its peers.
  [[ $name =~ ^(ca|server|peer|client|root|etcd|etcd-peer)$ ]] && fail "-u $name is not for a run"
done
for name in "${names[@]}"; do
  [[ $name =~ ^[A-Za-z0-9.:*-]+$ ]] || fail "-a $name is neither a host name nor an address"
done
command -v openssl >/dev/null || fail "openssl is not installed"

umask 077
mkdir -p "$1"
cd "$1"
work=$(mktemp -d "$PWD/.new.XXXXXX") # on the same file system: a full one leaves no half of a key
trap 'rm -r "$work"' EXIT

key() {
  [[ -e $1.key ]] && return
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$work/key" 2>/dev/null
  ln "$work/key" "$1.key" 2>/dev/null || cp -n "$work/key" "$1.key" # neither replaces one that came meanwhile
  rm "$work/key"
}

is_good() { # the certificate $1 is there, belongs to its key, is the present CA's, and lasts a while
  [[ -e $1.crt ]] && openssl x509 -in "$1.crt" -noout -checkend $((30 * 86400)) >/dev/null &&
    [[ $(openssl x509 -in "$1.crt" -noout -pubkey) == "$(openssl pkey -in "$1.key" -pubout)" ]] &&
    openssl verify -CAfile ca.crt "$1.crt" >/dev/null 2>&1 &&
    { [[ $1 == ca || ! -e $1.names ]] || cmp -s "$1.names" "$work/names"; }
}

authority() {
  key ca
  is_good ca && return
  openssl req -x509 -new -key ca.key -days $((10 * days)) -subj "/CN=elastic-trainer etcd" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$work/ca.crt"
  mv "$work/ca.crt" ca.crt
}

issue() { # file, common name, usage, subject alternative names
  local file=$1 name=$2 usage=$3 alternatives=$4
  printf '%s\n' "$alternatives" >"$work/names"
  key "$file"
  is_good "$file" && return
  {
    echo "basicConstraints=critical,CA:FALSE"
    echo "keyUsage=critical,digitalSignature"
    echo "extendedKeyUsage=$usage"
    [[ -z $alternatives ]] || echo "subjectAltName=$alternatives"
  } >"$work/extensions"
  openssl req -new -key "$file.key" -subj "/CN=$name" -out "$work/request"
  openssl x509 -req -in "$work/request" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
    -days "$days" -extfile "$work/extensions" -out "$work/crt" 2>/dev/null
  mv "$work/crt" "$file.crt"
  cp "$work/names" "$file.names"
}

hosts=(localhost etcd "etcd.$namespace" "etcd.$namespace.svc" "etcd.$namespace.svc.cluster.local")
for ((number = 0; number < replicas; number++)); do
  host=etcd-$number.etcd
  hosts+=("$host" "$host.$namespace" "$host.$namespace.svc" "$host.$namespace.svc.cluster.local")
done
alternatives="IP:127.0.0.1,IP:::1"
for host in "${hosts[@]}" "${names[@]}"; do
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then alternatives+=",IP:$host"; else alternatives+=",DNS:$host"; fi
done

authority
# etcd calls its own clients' port, so what it shows there must do for a client as well.
issue server etcd serverAuth,clientAuth "$alternatives"
issue peer etcd-peer serverAuth,clientAuth "$alternatives"
# etcd takes the common name for the user of who gives none, so this must be the name of no user.
issue client client clientAuth ""
for name in "${users[@]}"; do issue "$name" "$name" clientAuth ""; done

echo "valid until $(openssl x509 -in server.crt -noout -enddate | cut -d= -f2); keep ca.key where no cluster sees it:"
secret() {
  printf 'kubectl create secret generic %s -n %s --from-file=ca.crt=%q --from-file=tls.crt=%q --from-file=tls.key=%q\n' \
    "$1" "$namespace" "$PWD/ca.crt" "$PWD/$2.crt" "$PWD/$2.key"
}
for name in server peer client; do secret "etcd-$name-tls" "$name"; done
for name in "${users[@]}"; do secret "etcd-client-tls-$name" "$name"; done
