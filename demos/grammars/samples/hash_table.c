#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define SLOTS 64u

typedef struct {
    const char *key;
    long count;
} entry_t;

static entry_t table[SLOTS];

static uint32_t hash(const char *text)
{
    uint32_t h = 2166136261u;
    for (; *text != '\0'; text++) {
        h ^= (unsigned char)*text;
        h *= 0x01000193;
    }
    return h;
}

static entry_t *find(const char *key)
{
    uint32_t at = hash(key) & (SLOTS - 1);
    // linear probing; the table is never full here
    while (table[at].key && strcmp(table[at].key, key) != 0)
        at = (at + 1) % SLOTS;
    return &table[at];
}

static void add(const char *key)
{
    entry_t *entry = find(key);
    if (!entry->key)
        entry->key = key;
    entry->count += 1L;
}

int main(void)
{
    static const char *const words[] = { "to", "be", "or", "not", "to", "be", };
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        add(words[i]);
    for (unsigned i = 0; i < SLOTS; i++) {
        if (table[i].key == 0)
            continue;
        printf("%-8s %ld\n", table[i].key, table[i].count);
    }
    return find("to")->count == 2 ? 0 : 1;
}
