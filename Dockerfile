# The program in a container, for GKE:  docker build --tag IMAGE .
# For GPUs:  docker build --build-arg EXTRAS=train,cuda --tag IMAGE .
FROM python:3.11-slim

WORKDIR /synthesizer_jax
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY configs configs
COPY synthesizer_jax synthesizer_jax

ARG EXTRAS=train,gcs,tpu
RUN python -m pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

ENTRYPOINT ["synthesizer-jax"]
