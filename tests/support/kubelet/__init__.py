"""A stand-in for a Kubernetes node and its controllers: rendered manifests run as processes of this machine.

What it keeps to is what programs can notice: their environment, addresses, names, volumes, user, signals and time to
leave, and what the controllers make of their exit codes. A field that it does not know is an error.

Not played: limits of memory and CPU, scheduling, NetworkPolicy, seccomp, images' own files, limits of disk space.
"""
