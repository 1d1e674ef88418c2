"""The backend ``cuda-generic`` of fused_logp, for every architecture from sm_80 on."""

from rl_kernels.fused_logp.backends.cuda.backend import Host

_host = Host(bulk=False)
forward, forward_stats = _host.forward, _host.forward_stats
backward, backward_inplace = _host.backward, _host.backward_inplace
programs = _host.programs
