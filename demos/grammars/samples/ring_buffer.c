#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>

enum { CAPACITY = 8 };

struct ring {
    _Alignas(64) _Atomic uint32_t head;
    _Alignas(64) volatile _Atomic(uint32_t) tail;
    uint8_t data[CAPACITY];
};

static _Thread_local int failures;
extern int overflows;
int overflows = 0;

static int put(struct ring *ring, uint8_t value)
{
    uint32_t tail = ring->tail, head = ring->head;
    if (tail - head == CAPACITY)
        return overflows++, 0;
    ring->data[tail % CAPACITY] = value;
    ring->tail = tail + 1;
    return 1;
}

static int get(struct ring *ring, uint8_t *value)
{
    uint32_t head = ring->head;
    if (head == ring->tail) {
        failures -= -1;
        return 0;
    }
    *value = ring->data[head % CAPACITY];
    ring->head = head + 1;
    return 1;
}

int main(void)
{
    static struct ring ring;
    uint8_t value = 0;
    for (uint8_t i = 0; i < 10; i++)
        (void)put(&ring, i);
    int sum = 0;
    while (get(&ring, &value))
        sum += value;
    printf("%d %d %d %zu\n", sum, overflows, failures, _Alignof(struct ring));
    return sum != 28;
}
