select a,b,(c) from_c,f(x)*2 from t where (a=1) and b>=2
