"""The API of Hugging Face's Text Generation Inference (TGI), for clients that were written for it."""
