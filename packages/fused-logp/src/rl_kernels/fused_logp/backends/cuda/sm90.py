"""The backend ``cuda-sm90`` of fused_logp, for Hopper: the forward pass reads rows by bulk copies."""

from rl_kernels.fused_logp.backends.cuda.backend import Host

_host = Host(bulk=True)
forward, forward_stats = _host.forward, _host.forward_stats
backward, backward_inplace = _host.backward, _host.backward_inplace
programs = _host.programs
