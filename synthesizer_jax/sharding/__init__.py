"""Device meshes, and the rules that map logical axes to mesh axes."""

from synthesizer_jax.sharding.mesh import MeshShape as MeshShape
from synthesizer_jax.sharding.mesh import gather_to_host as gather_to_host
from synthesizer_jax.sharding.mesh import make_mesh as make_mesh
from synthesizer_jax.sharding.mesh import replicate_to_devices as replicate_to_devices
from synthesizer_jax.sharding.rules import BATCH_AXES as BATCH_AXES
from synthesizer_jax.sharding.rules import MESH_AXES as MESH_AXES
from synthesizer_jax.sharding.rules import RULES as RULES
from synthesizer_jax.sharding.rules import batch_sharding as batch_sharding
from synthesizer_jax.sharding.rules import batch_shards as batch_shards
from synthesizer_jax.sharding.rules import check_batch as check_batch
from synthesizer_jax.sharding.rules import partition_spec as partition_spec
from synthesizer_jax.sharding.rules import register_mesh_axis as register_mesh_axis
from synthesizer_jax.sharding.rules import replicated as replicated
from synthesizer_jax.sharding.rules import shardings as shardings
from synthesizer_jax.sharding.rules import use_mesh as use_mesh
