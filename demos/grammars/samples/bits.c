#include <limits.h>
#include <stdint.h>
#include <stdio.h>

_Static_assert(CHAR_BIT == 8, "bytes of eight bits" " are assumed");

struct flags {
    unsigned ready : 1;
    unsigned mode : 3, level : 4;
    unsigned : 0;
    signed int offset : 5;
};

static int ones(uint64_t x)
{
    int n = 0;
    while (x) {
        x &= x - 1;
        n++;
    }
    return n;
}

static uint32_t reversed(uint32_t x)
{
    x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
    x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
    x = ((x >> 4) & 0x0F0F0F0FU) | ((x & 0x0F0F0F0FU) << 4);
    x = ((x >> 8) & 0x00FF00FFul) | ((x & 0x00FF00FFul) << 8);
    return x >> 16 | x << 16;
}

static inline _Bool is_power(unsigned long long x) { return x && !(x & (x - 1ULL)); }

int main(void)
{
    struct flags flags = { .ready = 1, .mode = 5, .offset = -3 };
    flags.level |= 1 << 3;
    flags.level ^= ~0 & 017;
    printf("%d %x %d\n", ones(0xFFull << 30), (unsigned)reversed(1), is_power(1ull << 40));
    printf("%d %d %d\n", flags.mode, flags.level, flags.offset);
    uint32_t x = 0xDEADBEEF;
    x <<= 4, x >>= 8, x %= 1000003, x /= 3;
    return ones(x) == 0 || !!flags.ready != 1;
}
