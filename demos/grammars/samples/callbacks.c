#include <stdio.h>
#include <stdlib.h>

typedef int (*compare_t)(const void *, const void *);
typedef double binary_t(double, double);

static double plus(double a, double b) { return a + b; }
static double times(double a, double b) { return a * b; }

static int by_value(const void *left, const void *right)
{
    int a = *(const int *)left, b = *(const int *)right;
    return (a > b) - (a < b);
}

/* A function that returns a pointer to a function. */
static double (*choose(char name))(double, double)
{
    return name == '+' ? plus : &times;
}

static double fold(binary_t *combine, double start, const double *values, int count)
{
    while (count-- > 0)
        start = (*combine)(start, *values++);
    return start;
}

static void sort(int *values, size_t count, compare_t compare)
{
    qsort(values, count, sizeof(int), compare);
}

int main(void)
{
    int numbers[5] = { 42, 7, -1, 0, 19 };
    double values[] = { 1.5, 2, 4 };
    struct { char name; double (*apply)(double, double); } table[2] = {
        { '+', choose('+') },
        { .name = '*', .apply = choose('*') },
    };
    void (*const sorter)(int *, size_t, compare_t) = sort;

    sorter(numbers, 5, by_value);
    for (int i = 0; i < 5; i++)
        printf("%d ", numbers[i]);
    for (int i = 0; i < 2; i++)
        printf("%c: %.1f ", table[i].name, fold(table[i].apply, i, values, 3));
    puts("");
    return numbers[0] != -1;
}
