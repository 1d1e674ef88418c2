"""The demo over ranks: training on several processes has the bits of one."""
