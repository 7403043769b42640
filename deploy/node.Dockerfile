# A node: docker build -f deploy/node.Dockerfile -t verbatim-node:0.1.0 .
# In Kubernetes rollouts run in pods of their own and need nothing of this image. With local runtimes, as in compose.yaml, they run in
# sandboxes on this image's system: make one of your own from it that has the harnesses.
FROM python:3.11.11-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir hatchling==1.27.0
RUN python -m venv /opt/verbatim
COPY pins.txt ./
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY contract contract
COPY proxy proxy
COPY reconstruct reconstruct
COPY rollout rollout
COPY trainer_client trainer_client
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .
ARG EXTRAS=rollout
RUN /opt/verbatim/bin/pip install --no-cache-dir --no-compile --constraint pins.txt "$(ls /wheels/*.whl)[$EXTRAS]"

FROM python:3.11.11-slim-bookworm
# bubblewrap is what local runtimes are made of.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap git \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home verbatim && install -d -o 10001 -g 10001 /data
COPY --from=build /opt/verbatim /opt/verbatim
ENV PATH=/opt/verbatim/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 VERBATIM_NODE_DIR=/data
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["verbatim"]
CMD ["node"]
