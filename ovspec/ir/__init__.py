"""OpenVINO: compiled models, devices, infer requests and memory."""
