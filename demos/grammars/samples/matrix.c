#include <stdio.h>
#include <stdlib.h>

#define N 3

typedef double matrix_t[N][N];

static void multiply(matrix_t out, const matrix_t a, const matrix_t b)
{
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < N; k++)
                sum += a[i][k] * b[k][j];
            out[i][j] = sum;
        }
}

/* Rows of a matrix whose size is known at run time. */
static double trace(int n, double m[static n * n])
{
    double sum = 0.0;
    for (register int i = 0; i < n; ++i)
        sum += m[i * n + i];
    return sum;
}

static double determinant(matrix_t m)
{
    return m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
         - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
         + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0]);
}

int main(int argc, char **argv)
{
    matrix_t a = { { 1, 2, 3 }, { 0, 1, 4 }, { 5, 6, 0 } };
    matrix_t unit = { [0][0] = 1, [1][1] = 1, [2] = { [2] = 1 } }, product;
    multiply(product, a, unit);
    double scale = argc > 1 ? atof(argv[1]) : 1.0;
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++)
            printf(" %6.2f", scale * product[i][j]);
        putchar('\n');
    }
    printf("trace %g, determinant %g\n", trace(N, &product[0][0]), determinant(product));
    return determinant(product) != 1;
}
