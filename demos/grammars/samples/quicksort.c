#include <assert.h>
#include <stddef.h>

static inline void swap(double *restrict a, double *restrict b)
{
    double kept = *a;
    *a = *b, *b = kept;
}

static void quicksort(double values[], ptrdiff_t low, ptrdiff_t high)
{
    if (low >= high)
        return;
    double pivot = values[low + (high - low) / 2];
    ptrdiff_t i = low, j = high;
    do {
        while (values[i] < pivot) i++;
        while (values[j] > pivot) j--;
        if (i <= j)
            swap(&values[i++], &values[j--]);
    } while (i <= j);
    quicksort(values, low, j);
    quicksort(values, i, high);
}

int main(void)
{
    double values[] = { 3.5, -1.0, .25, 1e3, 0x1.8p1, 2.f, 7., -0.0, 6.02e23 };
    enum { COUNT = sizeof values / sizeof *values };
    quicksort(values, 0, COUNT - 1);
    for (int i = 1; i < COUNT; i++)
        assert(values[i - 1] <= values[i]);
    return 0;
}
