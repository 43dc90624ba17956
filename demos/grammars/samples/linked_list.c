#include <stdio.h>
#include <stdlib.h>

/* A singly linked list of integers. */
typedef struct node {
    int value;
    struct node *next;
} node_t;

static node_t *push(node_t *head, int value)
{
    node_t *node = malloc(sizeof *node);
    if (node == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(EXIT_FAILURE);
    }
    node->value = value;
    node->next = head;
    return node;
}

static node_t *reverse(node_t *head)
{
    node_t *result = NULL;
    while (head) {
        node_t *next = head->next;
        head->next = result;
        result = head;
        head = next;
    }
    return result;
}

static void release(node_t *head)
{
    for (node_t *next; head != NULL; head = next) {
        next = head->next;
        free(head);
    }
}

int main(void)
{
    node_t *list = NULL;
    for (int i = 0; i < 5; ++i)
        list = push(list, i * i);
    list = reverse(list);
    for (const node_t *at = list; at; at = at->next)
        printf("%d%c", at->value, at->next ? ' ' : '\n');
    release(list);
    return 0;
}
