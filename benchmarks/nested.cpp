// nested.cpp - what benchmarks/nested.py leaves to C++: a cache of nested copies to be played with, the search for a block's scale,
// and a product of rows that are read as far as so many bits. Compiled and loaded by _nested_format.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#    include <immintrin.h>
#    define WIDE 1
#endif

#if WIDE
// Eight sums of products of a block's weights and inputs, each of four; times scale onto the sums of the row.
static __m256 add_block(__m256 sums, __m256i w, const int8_t * x, float scale) {
    const __m256i v = _mm256_loadu_si256((const __m256i *) x);
    const __m256i s = _mm256_mask_sub_epi8(v, _mm256_movepi8_mask(w), _mm256_setzero_si256(), v); // unsigned times signed: the sign goes to the input
    const __m256i d = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_abs_epi8(w), s);
    return _mm256_fmadd_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(d), sums);
}

static float total(__m256 sums) {
    float each[8], sum = 0;
    _mm256_storeu_ps(each, sums);
    for (float e : each) {
        sum += e;
    }
    return sum;
}

template <int N_BITS> static float row_of_planes(const uint32_t * const * planes, const float * scale, const int8_t * x, const float * x_scale, int n_blocks, size_t first) {
    __m256 sums = _mm256_setzero_ps();
    for (int b = 0; b < n_blocks; ++b) {
        __m256i w = _mm256_set1_epi8((char) (N_BITS < 8 ? 0x80 >> N_BITS : 0));
        for (int p = 0; p < N_BITS; ++p) {
            w = _mm256_or_si256(w, _mm256_maskz_set1_epi8(planes[p][first + b], (char) (0x80 >> p)));
        }
        sums = add_block(sums, w, x + 32 * b, scale[first + b] * x_scale[b]);
    }
    return total(sums);
}

static float row_of_planes(int n_bits, const uint32_t * const * planes, const float * scale, const int8_t * x, const float * x_scale, int n_blocks, size_t first) {
    constexpr decltype(&row_of_planes<1>) OF[] = { row_of_planes<1>, row_of_planes<2>, row_of_planes<3>, row_of_planes<4>,
                                                   row_of_planes<5>, row_of_planes<6>, row_of_planes<7>, row_of_planes<8> };
    return OF[n_bits - 1](planes, scale, x, x_scale, n_blocks, first);
}
#else
static float row_of_planes(int n_bits, const uint32_t * const * planes, const float * scale, const int8_t * x, const float * x_scale, int n_blocks, size_t first) {
    float sum = 0;
    for (int b = 0; b < n_blocks; ++b) {
        int32_t dot = 0;
        for (int i = 0; i < 32; ++i) {
            uint8_t w = n_bits < 8 ? 0x80 >> n_bits : 0;
            for (int p = 0; p < n_bits; ++p) {
                w |= (planes[p][first + b] >> i & 1) << (7 - p);
            }
            dot += (int8_t) w * x[32 * b + i];
        }
        sum += scale[first + b] * x_scale[b] * dot;
    }
    return sum;
}
#endif

extern "C" {

// Plays a routing, one token at a time, a token's layers in order.
//   pos     [n_tokens]                       0: a sequence begins, records start anew
//   experts [n_layers][n_tokens][n_used]
//   wanted  [n_layers][n_tokens][n_used]     level, 0: skip
//   size    [n_levels + 1]                   bytes of an expert read as far as that level, size[0] = 0, rising
//   room    [n_levels + 1]                   what it takes in memory then, room[0] = 0, not falling
//   served  [n_layers][n_tokens][n_used]     out: level
// A use takes what is there where that is enough; else the missing part is loaded. What must go is the last part of the
// expert with the least priority: the rule of csrc/core/policy_hobbit.cpp, whose "high" uses are those that wanted the part, ties by the older use,
//   (R + F + F_part)/T + 1 - distance/n
// with own != 0 of the uses that wanted the part alone: (R_part + 2 F_part)/T + 1 - distance/n.
// whole != 0: each level is a copy of its own, loaded whole in place of a smaller one and given up whole.
// Returns the bytes loaded; -1 if one step does not fit.
int64_t nested_play(int n_layers, int n_expert, int n_used, int n_tokens, const int32_t * pos, const int32_t * experts, const int32_t * wanted,
                    int n_levels, const int64_t * size, const int64_t * room, int64_t budget, int own, int whole,
                    int32_t * served) {
    const int n = n_layers * n_expert;
    struct record { uint32_t last = 0, uses = 0; };
    std::vector<record>  of((size_t) n * (n_levels + 1)); // [expert][level]: uses that wanted at least that level; 0: all
    std::vector<int>     there(n, 0);
    std::vector<uint8_t> pinned(n, 0);
    std::vector<int64_t> clock(n, 0); // step of its last use
    int64_t used = 0, loaded = 0;
    uint32_t tokens = 0;
    for (int t = 0; t < n_tokens; ++t) {
        if (pos[t] == 0) {
            std::fill(of.begin(), of.end(), record());
            tokens = 0;
        }
        tokens++;
        for (int l = 0; l < n_layers; ++l) {
            const size_t at = ((size_t) l * n_tokens + t) * n_used;
            for (int r = 0; r < n_used; ++r) {
                const int e = l * n_expert + experts[at + r];
                pinned[e] = 1;
                clock[e]  = (int64_t) t * n_layers + l;
                for (int j = 0; j <= wanted[at + r]; ++j) {
                    of[(size_t) e * (n_levels + 1) + j].last = tokens;
                    of[(size_t) e * (n_levels + 1) + j].uses++;
                }
            }
            for (int r = 0; r < n_used; ++r) {
                const int e = l * n_expert + experts[at + r];
                const int w = wanted[at + r];
                if (there[e] < w) {
                    const int64_t more = room[w] - room[there[e]];
                    while (used + more > budget) {
                        int    victim = -1;
                        double least  = 1e300;
                        for (int v = 0; v < n; ++v) {
                            if (there[v] == 0 || pinned[v]) {
                                continue;
                            }
                            const record & all  = of[(size_t) v * (n_levels + 1)];
                            const record & part = of[(size_t) v * (n_levels + 1) + there[v]];
                            const int distance = (v / n_expert - l + n_layers - 1) % n_layers + 1; // the layer being served is the farthest
                            const double p = (own ? (double) part.last + 2.0 * part.uses : (double) all.last + all.uses + part.uses) / tokens
                                             + 1.0 - (double) distance / n_layers;
                            if (p < least || (p == least && clock[v] < clock[victim])) {
                                least  = p;
                                victim = v;
                            }
                        }
                        if (victim < 0) {
                            return -1;
                        }
                        int64_t freed = 0;
                        while (freed == 0 || (whole && there[victim] > 0)) {
                            freed += room[there[victim]] - room[there[victim] - 1];
                            there[victim]--;
                        }
                        used -= freed;
                    }
                    used   += more;
                    loaded += size[w] - (whole ? 0 : size[there[e]]);
                    there[e] = w;
                }
                served[at + r] = there[e];
            }
            for (int r = 0; r < n_used; ++r) {
                pinned[l * n_expert + experts[at + r]] = 0;
            }
        }
    }
    return loaded;
}

// The scale and least value of each block of 32 weights in units that are given, so that the prefixes lose least: of the codes around
// those that just hold the block, those with the smallest sum of squared errors of 3 to 8 planes, each times 4^planes.
//   weights [n][32], scale_unit, least_unit [n]; integers [n][32], scale, least [n] out
void nested_fit(int64_t n, const float * weights, const float * scale_unit, const float * least_unit, uint8_t * integers, float * scale, float * least) {
    constexpr int AROUND = 2;
    for (int64_t i = 0; i < n; ++i) {
        const float * w = weights + 32 * i;
        const float low  = std::max(-*std::min_element(w, w + 32), 0.0f);
        const float step = (*std::max_element(w, w + 32) + low) / 255;
        const int   s0 = (int) std::lround(step / scale_unit[i]), m0 = (int) std::lround(low / least_unit[i]);
        float best = 3e38f;
        for (int s = std::max(s0 - AROUND, 1); s <= std::min(std::max(s0, 1) + AROUND, 63); ++s) {
            for (int m = std::max(m0 - AROUND, 0); m <= std::min(m0 + AROUND, 63); ++m) {
                const float d = s * scale_unit[i], l = m * least_unit[i], inverse = 1 / d;
                int32_t q[32];
                float error = 0;
                for (int k = 0; k < 32; ++k) {
                    q[k] = (int32_t) std::min(std::max((w[k] + l) * inverse + 0.5f, 0.0f), 255.0f);
                }
                for (int rest = 0; rest <= 5; rest += rest == 0 ? 2 : 1) {
                    float sum = 0;
                    for (int k = 0; k < 32; ++k) {
                        const float e = d * ((q[k] >> rest << rest) + 0.5f * ((1 << rest) - 1)) - l - w[k];
                        sum += e * e;
                    }
                    error += sum * (float) (1 << (2 * (8 - rest)));
                }
                if (error < best) {
                    best     = error;
                    scale[i] = d;
                    least[i] = l;
                    for (int k = 0; k < 32; ++k) {
                        integers[32 * i + k] = (uint8_t) q[k];
                    }
                }
            }
        }
    }
}

// Rows in planes, times one vector of ggml's q8_0 blocks.
//   planes [n_bits] of uint32 [n_rows * n_in/32]: bit i of a word belongs to value i of the block; the sign's plane first
//   scale  float [n_rows * n_in/32], x int8 [n_in], x_scale float [n_in/32], y float [n_rows]
// A value of b bits is the 8-bit value with 1000... in place of the rest: the middle of what it may be.
void nested_product(int n_bits, const uint32_t * const * planes, const float * scale, const int8_t * x, const float * x_scale, int n_rows, int n_in, float * y) {
    for (int r = 0; r < n_rows; ++r) {
        y[r] = row_of_planes(n_bits, planes, scale, x, x_scale, n_in / 32, (size_t) r * (n_in / 32));
    }
}

// Rows of a type of ggml's, times one vector of the type that its kernel wants.
void ggml_product(void (*dot)(int n, float * s, size_t, const void * x, size_t, const void * y, size_t, int n_rows), const char * rows, size_t row_bytes, const void * x,
                  int n_rows, int n_in, float * y) {
    for (int r = 0; r < n_rows; ++r) {
        dot(n_in, y + r, 0, rows + r * row_bytes, 0, x, 0, 1);
    }
}

} // extern "C"
