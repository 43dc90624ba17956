#include <ctype.h>
#include <stdio.h>

typedef unsigned long size_type_t;

size_type_t length(const char *text)
{
    const char *end = text;
    while (*end)
        ++end;
    return (size_type_t)(end - text);
}

char *copy(char *to, const char *from)
{
    char *start = to;
    while ((*to++ = *from++) != 0)
        ;
    return start;
}

int compare(const char *a, const char *b)
{
    for (; *a == *b; a++, b++)
        if (!*a)
            return 0;
    return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
}

void capitalize(char *text)
{
    int inside = 0;
    for (char *at = text; *at; at++) {
        if (isalpha((unsigned char)*at)) {
            *at = (char)(inside ? tolower(*at) : toupper(*at));
            inside = 1;
        } else if (*at != '\'')
            inside = 0;
    }
}

int main(void)
{
    char buffer[64];
    copy(buffer, "don't \"panic\",\t" "said\x20the\040guide\n");
    capitalize(buffer);
    fputs(buffer, stdout);
    return compare(buffer, "Don't") > 0 && length("\\\0abc") == 1 ? 0 : 1;
}
