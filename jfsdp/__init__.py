"""Fully sharded data parallelism for JAX and Flax: the policy you state is the program that is emitted."""

from importlib.metadata import version as _version

from jfsdp.api import register_forward_method as register_forward_method
from jfsdp.api import shard as shard
from jfsdp.auto import auto_partitioning as auto_partitioning
from jfsdp.batch import shard_batch as shard_batch
from jfsdp.budget import offload_by_budget as offload_by_budget
from jfsdp.comm import AllGather as AllGather
from jfsdp.comm import Comm as Comm
from jfsdp.comm import Message as Message
from jfsdp.comm import ReduceScatter as ReduceScatter
from jfsdp.gradients import value_and_grad as value_and_grad
from jfsdp.inspect.contract import PolicyViolation as PolicyViolation
from jfsdp.inspect.topology import topology as topology
from jfsdp.jitted import jit as jit
from jfsdp.layout import shardings as shardings
from jfsdp.mesh import DataParallelMeshDims as DataParallelMeshDims
from jfsdp.policies import CPUOffloadPolicy as CPUOffloadPolicy
from jfsdp.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from jfsdp.policies import OffloadPolicy as OffloadPolicy
from jfsdp.quantized import QuantizedAllGather as QuantizedAllGather
from jfsdp.quantized import QuantizedReduceScatter as QuantizedReduceScatter
from jfsdp.reports import inspect as inspect
from jfsdp.reports import plan as plan
from jfsdp.states import init as init
from jfsdp.states import init_optimizer as init_optimizer
from jfsdp.states import unshard as unshard
from jfsdp.states import update_optimizer as update_optimizer
from jfsdp.two_stage import TwoStageAllGather as TwoStageAllGather

__version__ = _version("jfsdp")

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "Message",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PolicyViolation",
    "QuantizedAllGather",
    "QuantizedReduceScatter",
    "ReduceScatter",
    "TwoStageAllGather",
    "auto_partitioning",
    "init",
    "init_optimizer",
    "inspect",
    "jit",
    "offload_by_budget",
    "plan",
    "register_forward_method",
    "shard",
    "shard_batch",
    "shardings",
    "topology",
    "unshard",
    "update_optimizer",
    "value_and_grad",
]
