"""The model side of both workers: config, weights, models, KV pool, block manager, sampler, steps.

Workers use only :mod:`kvrelay.engine.step.interface`: they see an ``Engine`` and its ``BlockStore``, never a tensor.
:mod:`kvrelay.engine.fake.engine` implements the same interface without torch, for tests and for load on a machine without a model.
"""
