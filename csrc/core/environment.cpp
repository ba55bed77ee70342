#include "environment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <locale>
#include <sstream>

namespace hob {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string lower(std::string s) {
    std::transform(s.begin(), s.end(), s.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? (char) (c - 'A' + 'a') : c; });
    return s;
}

std::string trim(const std::string & s) {
    const size_t from = s.find_first_not_of(" \t\n\r\f\v"), to = s.find_last_not_of(" \t\n\r\f\v");
    return from == std::string::npos ? "" : s.substr(from, to - from + 1);
}

// Any number, whatever the process's locale; false for rests, nan and inf.
bool parse_number(const std::string & text, double & out) {
    std::istringstream in(trim(text));
    in.imbue(std::locale::classic());
    return in >> out && in.peek() == EOF && std::isfinite(out);
}

bool parse_switch(const std::string & text, bool & out) {
    const std::string s = lower(text);
    for (const char * yes : { "1", "true", "t", "yes", "y", "on" }) {
        if (s == yes) {
            out = true;
            return true;
        }
    }
    for (const char * no : { "0", "false", "f", "no", "n", "off" }) {
        if (s == no) {
            out = false;
            return true;
        }
    }
    return false;
}

const std::vector<std::string> POLICIES = { "lru", "lfu", "hobbit", "lcu", "follow" }; // enum hobbit_policy
const std::vector<std::string> MISSES   = { "fetch", "cpu", "auto" };                  // enum hobbit_miss
const std::vector<std::string> UNIFIED  = { "off", "on", "auto" };                     // enum hobbit_unified
const std::vector<std::string> COPIES   = { "rule", "low", "high" };                   // enum hobbit_prefetch_copy

bool parse_word(const std::vector<std::string> & words, const std::string & text, int32_t & out) {
    const auto it = std::find(words.begin(), words.end(), text);
    out = (int32_t) (it - words.begin());
    return it != words.end();
}

std::string one_of(const std::vector<std::string> & words) {
    std::string s = "it must be one of ";
    for (size_t i = 0; i < words.size(); ++i) {
        s += (i ? ", " : "") + words[i];
    }
    return s;
}

// --- the settings: each returns what is allowed if the value is not ---

std::string set_float(const std::string & value, float & out) {
    double x = 0.0;
    if (!parse_number(value, x)) {
        return "it must be a number";
    }
    out = (float) x;
    return "";
}

std::string set_cache(const std::string & value, hobbit_params & p) {
    const std::string text = lower(trim(value));
    const char * forms = "give a size such as 8GiB, a share such as 25% (of all experts at high precision), or min";
    if (text == "auto") {
        return "how much that is depends on the context, which is not known yet when a model is loaded; hobbit env MODEL.gguf --ctx N works it out, or " + std::string(forms);
    }
    if (text == "min") {
        p.budget_kind = HOBBIT_BUDGET_MIN;
        return "";
    }
    if (!text.empty() && text.back() == '%') {
        double percent = 0.0;
        if (!parse_number(text.substr(0, text.size() - 1), percent) || !(percent > 0.0 && percent <= 100.0)) {
            return "a share must be more than 0 and at most 100 %";
        }
        p.budget_kind    = HOBBIT_BUDGET_FRACTION;
        p.cache_fraction = percent / 100.0;
        return "";
    }
    if (!parse_bytes(text, p.cache_bytes)) {
        return forms;
    }
    p.budget_kind = HOBBIT_BUDGET_BYTES;
    return "";
}

std::string set_host_copies(const std::string & value, hobbit_params & p) {
    static const std::vector<std::string> WORDS = { "none", "all", "auto" }; // enum hobbit_host_copies
    if (parse_word(WORDS, value, p.host_copies)) {
        return "";
    }
    if (!parse_bytes(value, p.host_bytes) || p.host_bytes == 0) {
        return "give all, none, auto, or a size such as 16GiB";
    }
    p.host_copies = HOBBIT_HOST_SOME;
    return "";
}

std::string set_whole(const std::string & value, int32_t & out, int low, int high, const char * allowed) {
    double n = 0.0;
    if (!parse_number(value, n) || n != std::floor(n) || n < low || n > high) {
        return allowed;
    }
    out = (int32_t) n;
    return "";
}

// off: the flag turns the setting off
std::string set_switch(const std::string & value, int32_t & out, bool off) {
    bool on = false;
    if (!parse_switch(value, on)) {
        return "it must be true or false";
    }
    out = on != off;
    return "";
}

std::string set_prefetch(const std::string & value, hobbit_params & p) {
    static const std::vector<std::string> WORDS = { "0", "1", "2", "3", "auto" };
    if (!parse_word(WORDS, value, p.prefetch)) {
        return one_of(WORDS);
    }
    p.prefetch = value == "auto" ? (int32_t) HOBBIT_PREFETCH_AUTO : p.prefetch;
    return "";
}

struct setting {
    const char * name;
    std::string (*set)(const std::string & value, hobbit_params & p);
};

const setting SETTINGS[] = {
    { "CACHE",        set_cache },
    { "T1",           [](const std::string & v, hobbit_params & p) { return set_float(v, p.t1); } },
    { "T2",           [](const std::string & v, hobbit_params & p) { return set_float(v, p.t2); } },
    { "SKIP_MASS",    [](const std::string & v, hobbit_params & p) { return set_float(v, p.skip_mass); } },
    { "LOW_FRACTION", [](const std::string & v, hobbit_params & p) { return set_float(v, p.low_fraction); } },
    { "POLICY",       [](const std::string & v, hobbit_params & p) { return parse_word(POLICIES, v, p.policy) ? std::string() : one_of(POLICIES); } },
    { "MISS",         [](const std::string & v, hobbit_params & p) { return parse_word(MISSES, v, p.miss) ? std::string() : one_of(MISSES); } },
    { "HOST_COPIES",  set_host_copies },
    { "IO_THREADS",   [](const std::string & v, hobbit_params & p) { return set_whole(v, p.n_io_threads, 1, 64, "it must be a whole number from 1 to 64"); } },
    { "NO_DIRECT_IO", [](const std::string & v, hobbit_params & p) { return set_switch(v, p.direct_io, true); } },
    { "VERIFY",       [](const std::string & v, hobbit_params & p) { return set_switch(v, p.verify, false); } },
    { "UNIFIED_MEMORY", [](const std::string & v, hobbit_params & p) { return parse_word(UNIFIED, v, p.unified) ? std::string() : one_of(UNIFIED); } },
    { "PREFETCH",       set_prefetch },
    { "PREFETCH_COPY",  [](const std::string & v, hobbit_params & p) { return parse_word(COPIES, v, p.prefetch_copy) ? std::string() : one_of(COPIES); } },
    { "PREFETCH_RANKS", [](const std::string & v, hobbit_params & p) { return set_whole(v, p.prefetch_ranks, 0, INT32_MAX, "it must be a whole number of at least 0 (0: all)"); } },
    { "NO_PROMPT_PREFETCH", [](const std::string & v, hobbit_params & p) { return set_switch(v, p.prefetch_prompts, true); } },
    { "LEAN",         [](const std::string & v, hobbit_params & p) { return set_float(v, p.lean); } },
};

const std::string PREFIX = "HOBBIT_";

// Variables of other parts of this project.
bool is_others(const std::string & name) { return name.compare(0, 6, "SERVE_") == 0 || name == "LLAMA_CPP_SOURCE"; }

} // namespace

bool parse_bytes(const std::string & text, uint64_t & out) {
    const std::string s = lower(trim(text));
    uint64_t whole = 0;
    double   value = 0.0, digit = 1.0;
    size_t   at = 0, n_digits = 0;
    for (; at < s.size() && is_digit(s[at]); ++at, ++n_digits) {
        whole = whole * 10 + (uint64_t) (s[at] - '0');
        value = value * 10.0 + (s[at] - '0');
    }
    const bool fraction = at < s.size() && s[at] == '.';
    if (fraction) {
        for (++at; at < s.size() && is_digit(s[at]); ++at, ++n_digits) {
            value += (digit /= 10.0) * (s[at] - '0');
        }
    }
    const std::string unit = trim(s.substr(at));
    double factor = 1.0;
    if (!unit.empty() && unit != "b") {
        const size_t power = std::string("kmgt").find(unit[0]);
        const std::string rest = unit.substr(1);
        if (power == std::string::npos || (!rest.empty() && rest != "b" && rest != "ib")) {
            return false;
        }
        factor = std::pow(rest == "b" ? 1000.0 : 1024.0, (double) (power + 1));
    }
    if (n_digits == 0 || value * factor >= 9223372036854775808.0) {
        return false;
    }
    out = fraction ? (uint64_t) (value * factor) : whole * (uint64_t) factor;
    return true;
}

std::string from_environment(const char * const * variables, hobbit_params & p, std::vector<std::string> & used, std::vector<std::string> & unknown) {
    for (; variables && *variables; ++variables) {
        const char * equals = strchr(*variables, '=');
        if (!equals || strncmp(*variables, PREFIX.c_str(), PREFIX.size()) != 0) {
            continue;
        }
        const std::string name(*variables + PREFIX.size(), equals), value(equals + 1);
        const setting * s = std::find_if(std::begin(SETTINGS), std::end(SETTINGS), [&](const setting & x) { return name == x.name; });
        if (s == std::end(SETTINGS)) {
            if (!is_others(name)) {
                unknown.push_back(PREFIX + name);
            }
            continue;
        }
        const std::string allowed = s->set(value, p);
        if (!allowed.empty()) {
            return PREFIX + name + " is \"" + value + "\": " + allowed;
        }
        used.push_back(*variables);
    }
    return "";
}

} // namespace hob
