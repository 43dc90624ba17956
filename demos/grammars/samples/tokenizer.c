#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef DEBUG
#define TRACE(text) \
    puts(text)
#else
#define TRACE(text) ((void)0)
#endif

typedef enum { TOKEN_END, TOKEN_NUMBER, TOKEN_MARK } kind_t;

typedef struct token {
    kind_t kind;
    double number;
    char mark;
} token_t;

static const char *at;
static token_t token;

static void advance(void)
{
    while (isspace((unsigned char)*at)) at++;
    if (*at == '\0') {
        token = (token_t){ TOKEN_END };
    } else if (isdigit((unsigned char)*at) || *at == '.') {
        char *end;
        token.kind = TOKEN_NUMBER;
        token.number = strtod(at, &end);
        at = end;
    } else {
        token.kind = TOKEN_MARK, token.mark = *at++;
    }
}

static double sum(void);

static double factor(void)
{
    double value = 0;
    if (token.kind == TOKEN_NUMBER) {
        value = token.number;
        advance();
    } else if (token.mark == '-') {
        advance();
        value = -factor();
    } else if (token.mark == '(') {
        advance();
        value = sum();
        if (token.mark == ')') advance(); else fputs("missing )\n", stderr);
    }
    return value;
}

static double product(void)
{
    double value = factor();
    while (token.kind == TOKEN_MARK && (token.mark == '*' || token.mark == '/')) {
        char mark = token.mark;
        advance();
        if (mark == '*') value *= factor(); else value /= factor();
    }
    return value;
}

static double sum(void)
{
    double value = product();
    for (; token.kind == TOKEN_MARK && (token.mark == '+' || token.mark == '-');) {
        char mark = token.mark;
        advance();
        double right = product();
        value = mark == '+' ? value + right : value - right;
    }
    return value;
}

int main(int argc, char *argv[])
{
    at = argc > 1 ? argv[1] : "2 * (3 + 4) - 10 / 4";
    TRACE("starting");
    advance();
    printf("%g\n", sum());
    return token.kind != TOKEN_END;
}
