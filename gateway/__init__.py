"""kvrelay.gateway"""
