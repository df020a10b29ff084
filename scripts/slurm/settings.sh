# Sourced by node.sh: settings of NCCL, CUDA and PyTorch for GPU nodes. A value that is set already stays.
# shellcheck shell=bash

# Megatron requires it before Blackwell: kernels start in the order of their launch, so communication that is
# launched first is not kept waiting by compute.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Several ranks with as many threads as cores each slow one another down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Ranks have other numbers of rows in every step, which cuts memory in pieces of all sizes.
# The second name is the older one, which torch reads only where the first is not set.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
# Hopper: NVLink SHARP sets memory of every GPU aside for each communicator, and there are a dozen of them.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
# Why NCCL gave up, in the node's log.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# When a collective does not end: what every rank was in, written to a file of each rank.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Last words of a rank that is killed reach the log.
export PYTHONUNBUFFERED=1
# NCCL and gloo look for an interface by themselves, and may take one that does not reach the other nodes:
# INTERFACE=ib0 names it.
if [ -n "${INTERFACE:-}" ]; then export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE; fi
