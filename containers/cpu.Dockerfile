# deskside without a GPU: planning, data, evaluation and serving of small models, the dashboard.
#   python -m build && docker build -f containers/cpu.Dockerfile -t deskside:cpu .
ARG BASE=python:3.13-slim
FROM ${BASE}

# torch's CPU build is a twentieth of the CUDA build.
ARG TORCH_LINKS=https://download.pytorch.org/whl/cpu/torch/
COPY dist/*.whl /tmp/wheel/
RUN wheel=$(ls /tmp/wheel/deskside-*.whl) \
    && python3 -m venv /opt/deskside \
    && /opt/deskside/bin/pip install --no-cache-dir --find-links "${TORCH_LINKS}" "torch==2.13.0+cpu" \
    && /opt/deskside/bin/pip install --no-cache-dir "${wheel}[serve,dashboard,gguf]" \
    && rm -rf /tmp/wheel \
    && useradd --create-home --uid 10001 deskside \
    && mkdir -p /work/runs /work/data /cache \
    && chown -R deskside /work /cache

USER 10001
WORKDIR /work
ENV PATH=/opt/deskside/bin:$PATH XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME ["/work/runs", "/work/data", "/cache"]
EXPOSE 8000 8501
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["deskside"]
CMD ["--help"]
