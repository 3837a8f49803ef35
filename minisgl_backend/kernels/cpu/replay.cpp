// The calls of a recorded step, one after the other, without what Python takes for each.

#include <cstdint>
#include <utility>

namespace {

constexpr int kWords = 16;  // at most; see kernels/cpu/recording.py

struct Call {
  const void* function;
  float numbers[2];
  int64_t words[kWords];  // integers and pointers
};

// Every kernel takes integers and pointers, at most kWords, and at most two floats. The calling convention of x86-64 on
// Linux has registers for each kind, filled in the order of arguments, and a stack for further integers which the caller
// clears: so floats may be passed last, and a function does not notice integers that it does not take.
template <int... I>
void run(const Call& call, std::integer_sequence<int, I...>) {
  using Function = void (*)(decltype((void)I, int64_t())..., float, float);
  ((Function)call.function)(call.words[I]..., call.numbers[0], call.numbers[1]);
}

}  // namespace

extern "C" void minisgl_replay(const Call* calls, long count) {
  for (long i = 0; i < count; i++) run(calls[i], std::make_integer_sequence<int, kWords>());
}
