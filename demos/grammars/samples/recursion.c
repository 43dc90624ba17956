#include <stdio.h>

static int board[8], solutions;

static unsigned long long ackermann(unsigned m, unsigned n)
{
    return m == 0 ? n + 1ull : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1));
}

static int safe(int row, int column)
{
    for (int i = 0; i < row; i++) {
        int away = board[i] - column;
        if (away == 0 || away == row - i || away == i - row)
            return 0;
    }
    return 1;
}

static void place(int row)
{
    if (row == 8) {
        solutions++;
        return;
    }
    for (int column = 0; column < 8; column++)
        if (safe(row, column)) {
            board[row] = column;
            place(row + 1);
        }
}

static int is_even(int n);
static int is_odd(int n) { return n == 0 ? 0 : is_even(n - 1); }
static int is_even(int n) { return n == 0 || is_odd(n - 1); }

void hanoi(int n, char from, char to, char over, long *moves)
{
    if (n <= 0) return;
    hanoi(n - 1, from, over, to, moves);
    ++*moves;
    hanoi(n - 1, over, to, from, moves);
}

int main(void)
{
    long moves = 0L;
    place(0);
    hanoi(10, 'A', 'B', 'C', &moves);
    printf("%d %llu %ld %d\n", solutions, ackermann(2, 3), moves, is_even(10) && !is_odd(4));
    return !(solutions == 92 && moves == (1 << 10) - 1);
}
