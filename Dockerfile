# pkb-env in a container: docker build -t pkb-env . && docker run --rm pkb-env
# Flags that give candidates' boxes all their walls: docs/containers.md
FROM python:3.11-slim

# Candidates' C++ is compiled where they run.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ make \
 && rm -rf /var/lib/apt/lists/*

# Everybody's CPU results come from the same torch.  For GPUs name a torch built with CUDA, and install nvcc beside it.
ARG TORCH="torch==2.13.0"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pkb_env pkb_env
COPY problems problems
COPY rewards rewards
RUN pip install --no-cache-dir ${TORCH} . && rm -rf /src

# The folders are there so that volumes on them belong to the user.
RUN useradd --create-home --uid 10001 pkb && install --directory --owner pkb /home/pkb/.cache /home/pkb/store
COPY --chown=pkb examples /home/pkb/examples
USER pkb
WORKDIR /home/pkb
# Spinning OpenMP threads would steal the cores from the ranks that are being timed.
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["pkb"]
CMD ["doctor"]
