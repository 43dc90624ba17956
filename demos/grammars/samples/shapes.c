#include <stdio.h>

typedef enum shape_kind { CIRCLE, BOX } shape_kind_t;

typedef struct shape {
    shape_kind_t kind;
    union {
        struct { float radius; };
        struct { float width, height; } box;
    };
} shape_t;

typedef union word {
    unsigned int whole;
    unsigned char bytes[sizeof(unsigned int)];
} word_t;

static float area(const shape_t *shape)
{
    switch (shape->kind) {
    case CIRCLE: {
        const float pi = 3.14159265f;
        return pi * shape->radius * shape->radius;
    }
    case BOX:
        return shape->box.width * shape->box.height;
    }
    return 0.f;
}

static shape_t box(float width, float height)
{
    return (shape_t){ .kind = BOX, .box = { width, height } };
}

static float total(const shape_t shapes[const], int count)
{
    float sum = 0;
    for (int i = 0; i < count; ++i) sum += area(shapes + i);
    return sum;
}

int main(void)
{
    shape_t shapes[] = { { CIRCLE, { { 1.0f } } }, box(2, 3), box(.5f, 4e0f) };
    word_t word = { .whole = 0x01020304 };
    printf("%.3f\n", (double)total(shapes, (int)(sizeof shapes / sizeof(shape_t))));
    printf("%s-endian\n", word.bytes[0] == 4 ? "little" : "big");
    return area(&(shape_t){ .kind = BOX, .box.width = 2, .box.height = 2 }) != 4;
}
