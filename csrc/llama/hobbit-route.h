// hobbit-route.h - what a route operation gives, read by the operations after it.

#pragma once

// Planes of its result, I32 [n_used, n_tokens, N_PLANES]; or, where a device looks the experts up, the first N_TABLES as
// tables, I32 [n_expert, N_TABLES].
enum hobbit_plane {
    PLANE_HIGH = 0,  // slots of the wave's high copies
    PLANE_LOW,       // and low ones
    PLANE_KEPT,      // experts that are served
    PLANE_CPU_HIGH,  // experts that the CPU computes
    PLANE_CPU_LOW,
    PLANE_UNITS,     // of the inner width that a slot has
    PLANE_TAIL,      // first index of the inner width that the CPU computes
    PLANE_HIGH_1,    // slots of wave 1, where all waves are handed out together
    PLANE_LOW_1,
    N_PLANES,
    N_TABLES = PLANE_KEPT + 1,
};
