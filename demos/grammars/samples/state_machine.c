#include <stdio.h>

enum state { IDLE, RUNNING = 4, PAUSED, STOPPED, };
enum event { START = 'a', PAUSE, RESUME, STOP };

static const char *name_of(enum state state)
{
    switch (state) {
    case IDLE: return "idle";
    case RUNNING: return "running";
    case PAUSED: return "paused";
    case STOPPED:
    default:
        break;
    }
    return "stopped";
}

static enum state next(enum state state, enum event event)
{
    switch (event) {
    case START:
        if (state == IDLE)
            return RUNNING;
        else
            goto refused;
    case PAUSE:
        return state == RUNNING ? PAUSED : state;
    case RESUME: {
        enum state result = state;
        if (state == PAUSED) result = RUNNING;
        return result;
    }
    case STOP:
        return STOPPED;
    }
refused:
    fprintf(stderr, "event %c refused in state %s\n", (int)event, name_of(state));
    return state;
}

int main()
{
    const enum event events[] = { START, PAUSE, START, RESUME, STOP };
    enum state state = IDLE;
    int i = 0;
again:
    state = next(state, events[i]);
    printf("%d: %s\n", i, name_of(state));
    if (++i < (int)(sizeof events / sizeof events[0])) goto again;
    return state != STOPPED;
}
