# kvcellar's image with other packages of its own.
ARG BASE
FROM ${BASE}
USER 0:0
COPY sidecar/kvcellar /venv/lib/python3.11/site-packages/kvcellar
COPY operator/kvcellar_operator /venv/lib/python3.11/site-packages/kvcellar_operator
RUN /venv/bin/python3 -m compileall -q -f --invalidation-mode unchecked-hash \
        /venv/lib/python3.11/site-packages/kvcellar /venv/lib/python3.11/site-packages/kvcellar_operator
USER 65532:65532
