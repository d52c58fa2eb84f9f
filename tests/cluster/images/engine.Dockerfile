# What engines of the tests run in: Python, numpy, and the library that vLLM's CPU build wants besides.
ARG BASE
FROM ${BASE}
COPY numpy.txt /tmp/
RUN --mount=type=secret,id=ca,target=/run/kvcellar-ca.pem \
    if [ -s /run/kvcellar-ca.pem ]; then export PIP_CERT=/run/kvcellar-ca.pem; fi; \
    python3 -m venv /tmp/pip && \
    /tmp/pip/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check \
        --require-hashes --no-deps --only-binary=:all: --target /usr/local/lib/python3.11/dist-packages \
        -r /tmp/numpy.txt && \
    rm -r /tmp/pip
COPY *_engine.py /engines/
USER 1000:1000
