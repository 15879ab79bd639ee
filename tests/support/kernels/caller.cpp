// Calls functions of a library by name, as standard input asks, so that kernels for other cores run under an emulator.
//
// A request: the length of the function's name and the name; the number of buffers, and for each its bytes and contents;
// the number of arguments, and for each its kind and value: 'p', a buffer and an offset into it; 'i', an integer; 'f', a
// float. The answer: what the function returned, and the buffers' contents. Numbers are int64 unless they are floats.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kMostIntegers = 48, kMostFloats = 8;

void read(void* to, size_t size) {
    if (size && std::fread(to, size, 1, stdin) != 1) std::exit(0);
}

void write(const void* from, size_t size) { std::fwrite(from, size, 1, stdout); }

int64_t number() {
    int64_t value;
    read(&value, sizeof value);
    return value;
}

// Integers and pointers have registers of their own and then the stack, eight bytes each; up to eight floats have
// registers of their own too. So all functions can be called as if their integers came first, and there were more.
template <size_t... I, size_t... F>
int64_t call(void* function, const int64_t* integers, const float* floats, std::index_sequence<I...>,
             std::index_sequence<F...>) {
    typedef int64_t (*Any)(decltype(I, int64_t{})..., decltype(F, float{})...);
    return reinterpret_cast<Any>(function)(integers[I]..., floats[F]...);
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    for (;;) {
        std::string name(number(), 0);
        read(name.data(), name.size());
        std::vector<std::pair<char*, int64_t>> buffers(number());
        for (auto& [data, size] : buffers) {
            size = number();
            data = static_cast<char*>(std::aligned_alloc(64, (size + 127) / 64 * 64));
            read(data, size);
        }
        int64_t integers[kMostIntegers] = {}, *integer = integers;
        float floats[kMostFloats] = {}, *value = floats;
        for (int64_t left = number(); left > 0; left--) {
            const int64_t kind = number();
            if (kind == 'p') {
                const int64_t buffer = number();
                *integer++ = reinterpret_cast<int64_t>(buffers[buffer].first) + number();
            } else if (kind == 'i') {
                *integer++ = number();
            } else {
                read(value++, sizeof(float));
            }
        }
        void* function = dlsym(library, name.c_str());
        if (!function) return std::fprintf(stderr, "%s\n", dlerror()), 1;
        const int64_t result = call(function, integers, floats, std::make_index_sequence<kMostIntegers>{},
                                    std::make_index_sequence<kMostFloats>{});
        write(&result, sizeof result);
        for (auto& [data, size] : buffers) {
            write(data, size);
            std::free(data);
        }
        std::fflush(stdout);
    }
}
