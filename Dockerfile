# syntax=docker/dockerfile:1
# One image for every role: the training pods run torchrun in it, the monitor runs elastic-trainer.
#
#   docker build -t elastic-trainer .
#   docker build -t elastic-trainer:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# The project's own checks have no container engine: they read this file but never build it.

ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
# Where to find another build of torch than PyPI's (which brings CUDA); constraints.txt keeps its version.
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /src
COPY constraints.txt ./
# A layer of its own: it is by far the largest and changes least.
RUN /opt/venv/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY elastic_trainer ./elastic_trainer
RUN /opt/venv/bin/pip install -c constraints.txt '.[examples]'

FROM python:${PYTHON_VERSION}-slim-bookworm
# Numeric, so that Kubernetes can check runAsNonRoot without reading the image's user table.
ARG UID=10001
RUN groupadd --gid ${UID} trainer && useradd --uid ${UID} --gid ${UID} --create-home --shell /usr/sbin/nologin trainer
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/trainer
USER ${UID}:${UID}
# No ENTRYPOINT: the process given as the command is PID 1 and gets SIGTERM itself, as torchrun must.
CMD ["torchrun", "--help"]
