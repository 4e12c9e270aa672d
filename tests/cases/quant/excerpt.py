"""Cuts the small case files of this folder out of the full ones: python3 excerpt.py FULL_FOLDER (needs h5py, numpy)."""
import sys
from pathlib import Path

import h5py
import numpy as np

FULL, HERE = Path(sys.argv[1]), Path(__file__).parent
NVFP4 = ["all_zero", "exact_ties", "near_float_max", "tiny_normal", "outlier", "wide_range"]
PERCHANNEL = ["exact_ties", "wide_range"]


def write(out, name, data, attributes):
    dataset = out.create_dataset(name, data=data, **({} if data.ndim == 0 else {"compression": 9, "shuffle": True}))
    dataset.attrs.update(attributes)


def copy(name, choose, keep=lambda path: True):
    """Copies groups, attributes and the part of each dataset that `choose(path, dataset)` returns."""
    with h5py.File(FULL / name) as full, h5py.File(HERE / name, "w") as out:

        def visit(path, item):
            if not keep(path):
                return
            if isinstance(item, h5py.Group):
                out.require_group(path).attrs.update(item.attrs)
            else:
                write(out, path, np.asarray(choose(path, item)), item.attrs)

        full.visititems(visit)


def sample(count):
    """Evenly spaced elements of vectors longer than `count` (the same ones in all vectors of a length); decode tables whole."""

    def choose(path, item):
        if path.endswith("/decode") or len(item) <= count:
            return item[()]
        return item[()][np.linspace(0, len(item) - 1, count).astype(int)]

    return choose


copy("formats.h5", sample(3000))
copy("stochastic.h5", sample(1500))
copy("philox.h5", sample(64))
copy("nvfp4.h5", lambda path, item: item[()], lambda path: path.split("/")[0] in NVFP4)
copy("perchannel.h5", lambda path, item: item[()], lambda path: path.split("/")[0] in PERCHANNEL)
