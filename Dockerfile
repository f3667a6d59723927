# The program in a container, for GKE, from the wheel:  make dist && docker build --tag IMAGE .
# For GPUs:  docker build --build-arg EXTRAS=train,cuda --tag IMAGE .
FROM python:3.11-slim

COPY constraints.txt dist/*.whl /install/
ARG EXTRAS=train,gcs,tpu
RUN wheel=$(echo /install/*.whl) && \
    python -m pip install --no-cache-dir -c /install/constraints.txt "$wheel[$EXTRAS]" && rm -r /install

ENTRYPOINT ["synthesizer-jax"]
