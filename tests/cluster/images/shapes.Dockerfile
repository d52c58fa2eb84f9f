# Images of engines that differ from the usual one: each stage is one of them.
ARG ENGINE
FROM ${ENGINE} AS own-path
COPY --chmod=644 own_module.py /opt/own/
ENV PYTHONPATH=/opt/own

FROM ${ENGINE} AS no-shell
USER 0:0
RUN ["rm", "/bin/bash", "/bin/dash", "/bin/sh"]
USER 1000:1000
