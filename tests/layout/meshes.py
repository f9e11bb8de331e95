"""Small meshes for tests that draw them at random."""

from random import Random

from autoshard.layout.shards import VirtualMesh


def random_mesh(rng: Random) -> VirtualMesh:
    """Up to three atoms, some of size one, over 2 to 16 ranks."""
    while True:
        mesh = VirtualMesh(atoms=tuple((name, rng.choice([1, 2, 2, 3, 4])) for name in "abc"[: rng.randint(1, 3)]))
        if 1 < mesh.num_ranks <= 16:
            return mesh
