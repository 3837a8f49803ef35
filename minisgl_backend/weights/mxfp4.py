"""The format `mxfp4`: experts that a checkpoint has in MXFP4."""

from __future__ import annotations

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.experts.mxfp4 import Mxfp4ExpertsMethod, whole_blocks
from minisgl_backend.weights.method import LinearMethod, LinearSpec, MethodFactory


class Mxfp4Factory(MethodFactory):
    """Of a checkpoint: weights are not converted to MXFP4 while they load."""

    weight_format = "mxfp4"

    def linear(self, spec: LinearSpec) -> LinearMethod:
        raise ConfigError(
            f"quantization_config makes {spec.outputs[0].name} MXFP4; allowed: experts alone, with all else in "
            "modules_to_not_convert"
        )

    def experts(self, spec: ExpertsSpec) -> Mxfp4ExpertsMethod:
        return Mxfp4ExpertsMethod(whole_blocks(spec), self.mixtures, self.dtype, self.device)
