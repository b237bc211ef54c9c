"""A stand-in for a Kubernetes node and its controllers: the rendered dev overlay runs as processes of this machine.

It plays what programs can notice: their environment, addresses, names, volumes, user, signals and grace period, and
what the controllers make of their exit codes. That manifests are well-formed is for their schemas to say.

Not played: limits of memory and CPU, scheduling, NetworkPolicy, disruption budgets, seccomp, images' own files, limits
of disk space, delays that grow with each restart.
"""
