#include <math.h>
#include <stddef.h>
#include <stdio.h>

#define KIND(x) _Generic((x), int: "int", double: "double", char *: "text", default: "other")

struct header {
    char tag[4];
    long size;
    struct { short x, y; } origin[2];
};

/* As functions were defined before 1989. */
static int larger(a, b)
    int a;
    int b;
{
    return a > b ? a : b;
}

static int magnitude(long double x)
{
    int result = 0;
    for (x = x < 0.0L ? -x : x; x >= 10.0L; x /= 10)
        result++;
    return result;
}

int main(void)
{
    const wchar_t wide[] = L"na\u00efve";
    const char *plain = u8"text", mark = '\x41';
    double half = .5;
    printf("%s %s %s\n", KIND(1), KIND(half), KIND(plain));
    printf("%s\n", _Generic(half * 2, double: "double", default: "not"));
    printf("%zu %zu\n", offsetof(struct header, size), offsetof(struct header, origin[1].y));
    printf("%d %d %d\n", larger(3, 4), magnitude(-12345.678L), (int)(sizeof wide / sizeof *wide));
    if (mark == 'A') {
        if (half > 1) puts("no");
        else if (half > .25) puts("yes");
        else ;
    }
    return larger(1, 2) != 2;
}
