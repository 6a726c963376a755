"""kvrelay.decode_worker"""
