#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static _Noreturn void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    exit(2);
}

static int sum(int count, ...)
{
    va_list arguments;
    int result = 0;
    va_start(arguments, count);
    while (count --> 0)
        result += va_arg(arguments, int);
    va_end(arguments);
    return result;
}

static double mean(const char *kinds, ...)
{
    va_list arguments;
    double result = 0;
    int count = 0;
    va_start(arguments, kinds);
    for (const char *kind = kinds; *kind; kind++, count++) {
        if (*kind == 'i')
            result += va_arg(arguments, int);
        else if (*kind == 'd')
            result += va_arg(arguments, double);
        else if (*kind == 's')
            result += atof(va_arg(arguments, const char *));
        else
            fail("mean: unknown kind %c at %td\n", *kind, kind - kinds);
    }
    va_end(arguments);
    return count ? result / count : 0;
}

int main(void)
{
    if (sum(4, 1, 2, 3, 4) != 10)
        fail("%s\n", "sum");
    if (mean("ids", 1, 2.0, "3") != 2)
        fail("%s\n", "mean");
    printf("%d %g\n", sum(0), mean(""));
    return 0;
}
