# Penstock on a CPU: docker build --tag penstock . ; docs/container.md says how it is run.
#
# Two stages: the first has a compiler and the sources, the second only what they became.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# An index that holds PyTorch without CUDA, whose libraries are most of the image and of no use to a CPU.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH
WORKDIR /source
# torch before the sources: a change to them does not fetch it again.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY native native
COPY src src
# Without compiled kernels there would be a slow image, so there is none: a wheel for any platform has none.
RUN pip wheel --verbose --no-deps --wheel-dir wheels . \
    && ! ls wheels/*-none-any.whl
RUN pip install --constraint constraints.txt wheels/*.whl huggingface_hub pyzmq

FROM python:${PYTHON}-slim
COPY --from=build /opt/penstock /opt/penstock
# Models are fetched into the volume by the first start; the user owns it and nothing else.
RUN useradd --system --uid 10001 --create-home penstock \
    && install --directory --owner penstock --group penstock /models
ENV PATH=/opt/penstock/bin:$PATH \
    PENSTOCK_CACHE=/models \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
# By its number: an orchestrator that wants no root can see that it is none.
USER 10001
WORKDIR /home/penstock
VOLUME /models
EXPOSE 8000
# The one path that needs no key. The first start fetches a model before it listens.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
ENTRYPOINT ["penstock"]
# Reached from outside the container, so it starts only with a key: PENSTOCK_API_KEY.
CMD ["serve", "--host", "0.0.0.0"]
