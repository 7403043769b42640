# The example trainer, examples/trainers/torch_loop.py: docker build -f deploy/trainer.Dockerfile -t verbatim-trainer:0.1.0 .
FROM python:3.11.11-slim-bookworm
WORKDIR /src
COPY constraints.txt pins.txt pyproject.toml README.md LICENSE ./
COPY cli cli
COPY contract contract
COPY proxy proxy
COPY reconstruct reconstruct
COPY rollout rollout
COPY trainer_client trainer_client
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir --no-compile --constraint constraints.txt --constraint pins.txt '.[trainer]' transformers==5.19.0
COPY examples examples
RUN useradd --uid 10001 --create-home verbatim && install -d -o 10001 -g 10001 /cache /weights
ENV PYTHONUNBUFFERED=1 HOME=/cache
USER 10001:10001
ENTRYPOINT ["python", "-m", "examples.trainers.torch_loop"]
