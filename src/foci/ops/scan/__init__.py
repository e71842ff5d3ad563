"""The elementwise scan: h_t = exp(g_t) h_{t-1} + x_t."""
