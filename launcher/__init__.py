"""kvrelay.launcher"""
