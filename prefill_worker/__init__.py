"""kvrelay.prefill_worker"""
