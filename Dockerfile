# kvcellar's one image: sidecar, start gate and operator.
#
#   make image                     with docker, podman or buildah
#   make image BASE=some/python    on another image with Python 3.11 or newer and a shell
#
# The first stage has pip and a build backend, the last one neither: all that it adds to its base is one
# virtual environment.

ARG BASE=python:3.13-slim

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /build && python3 -m venv --without-pip /venv
COPY requirements/image.txt requirements/image-build.txt requirements/
# Settings of pip, such as another index, and a CA to trust besides, come as secrets: no layer keeps them.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/run/kvcellar-ca.pem \
    if [ -s /run/kvcellar-ca.pem ]; then export PIP_CERT=/run/kvcellar-ca.pem; fi; \
    pip="/build/bin/python -m pip --disable-pip-version-check --no-cache-dir"; \
    locked="install --quiet --require-hashes --no-deps --only-binary=:all: --no-compile"; \
    $pip $locked -r requirements/image-build.txt && \
    $pip --python /venv/bin/python3 $locked -r requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY sidecar sidecar
COPY operator operator
# Nothing may write byte code later, so all of it is made here. It is not checked against its source, whose
# date a copy may change.
RUN pip="/build/bin/python -m pip --disable-pip-version-check --no-cache-dir"; \
    $pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir /wheels . && \
    $pip --python /venv/bin/python3 install --quiet --no-index --no-deps --no-compile \
        /wheels/kvcellar-*.whl && \
    /venv/bin/python3 -m compileall -q --invalidation-mode unchecked-hash /venv/lib

FROM ${BASE}
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvcellar" \
      org.opencontainers.image.description="Owns the host memory that vLLM engines offload their KV cache to" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# What installs packages goes. Some bases come without the byte code of the standard library.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip \
        /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/site-packages/setuptools* \
        /usr/lib/python3*/ensurepip /usr/lib/python3/dist-packages/pip* /usr/share/python-wheels \
        /usr/bin/pip* && \
    python3 -m compileall -q -x '/(test|tests|idlelib|lib2to3|tkinter|turtledemo|site-packages|dist-packages)/' \
        "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY --from=build /venv /venv
ENV PATH=/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
# By number, so that Kubernetes sees that it is not root. Any other user does as well: files are read only.
USER 65532:65532
CMD ["kvcellar", "sidecar"]
