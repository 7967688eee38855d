from jfsdp.api import shard as shard
from jfsdp.mesh import DataParallelMeshDims as DataParallelMeshDims
from jfsdp.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
